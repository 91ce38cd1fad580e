{{- define "stoker.name" -}}
{{- if contains "stoker" .Release.Name }}{{ .Release.Name | trunc 63 | trimSuffix "-" }}{{ else }}{{ printf "%s-stoker" .Release.Name | trunc 63 | trimSuffix "-" }}{{ end }}
{{- end }}

{{- define "stoker.selector" -}}
app.kubernetes.io/name: stoker
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "stoker.labels" -}}
{{ include "stoker.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end }}

{{- define "stoker.serviceAccount" -}}
{{ .Values.serviceAccount.name | default (include "stoker.name" .) }}
{{- end }}

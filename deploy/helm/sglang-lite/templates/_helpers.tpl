{{- define "sglang-lite.labels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "sglang-lite.name" -}}
{{ printf "%s-%s" .Release.Name .Chart.Name | trunc 50 | trimSuffix "-" }}
{{- end }}

{{- define "sglang-lite.keys" -}}
{{- if .Values.secret }}
env:
  - name: SGLANG_LITE_API_KEY
    valueFrom:
      secretKeyRef:
        name: {{ .Values.secret }}
        key: api-key
  - name: SGLANG_LITE_ADMIN_API_KEY
    valueFrom:
      secretKeyRef:
        name: {{ .Values.secret }}
        key: admin-api-key
        optional: true
{{- end }}
{{- end }}
